#include "attention.h"
#include "linear.h"
#include "rms_norm.h"
#include "swiglu.h"
#include <stdio.h>
#include <time.h>
static double now(void){struct timespec t;clock_gettime(CLOCK_THREAD_CPUTIME_ID,&t);return t.tv_sec*1e6+t.tv_nsec*1e-3;}
#define TIME(name, code) {double b=1e9;for(int r=0;r<200;r++){double t=now();code;t=now()-t;if(t<b)b=t;}printf("%s %.2f us\n",name,b);}
int main(){
 static bf16 x[8*576];static float w[1536],n[8*1536],qkv[8*960],att[8*576],gu[8*3072];
 static bf16 keys[16*3*64*64],values[16*3*64*64]; static float cosv[4096*32],sinv[4096*32];
 for(int i=0;i<8*576;i++)x[i]=0x3f80+i%50; for(int i=0;i<1536;i++)w[i]=1;for(int i=0;i<8*960;i++)qkv[i]=(i%7)*0.1;for(int i=0;i<8*3072;i++)gu[i]=(i%7)*0.1-0.3;
 int32_t pos[8]={256,257,258,259,260,261,262,263},seq[8]={0},pt[16]={0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15};
 for(int T=1;T<=8;T+=7){ printf("T=%d\n",T);
 Rows rows={pos,seq,pt,0,T,16};Cache cache={keys,values,1,3,64};Attention a={0.125,9,0,0};Rotary rot={cosv,sinv};
 TIME("norm",rms_norm_share(x,1,w,1e-5,T,576,n));
 TIME("rope",rope_and_write_share(qkv,9,&rows,&cache,rot,1));
 TIME("attention",attention_share(qkv,960,&a,&rows,&cache,1,att));
 TIME("swiglu",for(int t=0;t<T;t++)swiglu_columns(gu+t*3072,gu+t*3072+1536,1536,1,gu+t*3072));
 static float logits[64],sum[64];
 TIME("page logits x36",for(int i=0;i<36;i++)page_logits(qkv,keys,1,64,0.1,logits));
 TIME("page softmax x36",for(int i=0;i<36;i++)page_softmax(logits,5));
 TIME("page max x36",for(int i=0;i<36;i++)logits[0]=page_maximum(logits));
 TIME("page sum x36",for(int i=0;i<36;i++)page_sum(logits,values,1,64,0,64,sum));
 Linear lin={0,0,576,576,1};Result res={x,576,1,1,1};
 TIME("finish add",for(int t=0;t<T;t++)for(int p=0;p<36;p++)finish_row(gu,&lin,res,t,p*16,p*16+16));
 Result r2={qkv,960,0,1,0};
 TIME("finish plain 960",for(int t=0;t<T;t++)for(int p=0;p<60;p++)finish_row_plain(gu,r2,t,p*16,p*16+16));
 }
 }
